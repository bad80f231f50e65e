"""What computes: the op-set, its backends, and the stored formats they read."""
