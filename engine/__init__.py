"""The engine pod: token ids in, numbers out. Importing the package imports no torch."""
