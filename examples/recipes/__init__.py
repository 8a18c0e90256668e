"""Recipes: whole tasks against a running server, each in one short program. docs/recipes.md shows their output."""
