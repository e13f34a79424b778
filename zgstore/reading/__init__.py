"""From a snapshot to batches: verified at first use, in any order, by any number of workers."""
