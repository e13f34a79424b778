"""How a block's gradient is had: by automatic differentiation, or estimated from forward queries."""
