"""One store: immutable files, names, leases, and the index that can be thrown away. Bytes only."""
