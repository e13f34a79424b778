"""How a block's gradient is had: ``(loss, block) -> queries``, leaving ``.grad`` on the block's parameters."""
