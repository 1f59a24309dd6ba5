"""Matrix kernels behind one interface, with an XLA implementation."""
