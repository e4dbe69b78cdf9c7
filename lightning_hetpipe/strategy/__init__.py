"""HetPipeStrategy, its settings and its parts."""
