"""HTTP endpoints, one file for each family."""
