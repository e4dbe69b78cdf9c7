"""Plans and profiles as documents: dataclasses, table, JSON files, cache."""
