"""HetPipeStrategy: what Lightning sees."""
