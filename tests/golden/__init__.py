"""Golden table: every error sentence of the package names its setting, its value and the way out."""
