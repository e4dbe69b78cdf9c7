"""Golden table: every error sentence of the package names its setting, its value and the way out.

A case says what its sentence must name; all other words may change. To add a place that makes an error, add a case to
the table of its subject. ``python -m tests.golden`` lists the places that no case reaches.
"""
