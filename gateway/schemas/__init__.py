"""Bodies of the public API, as msgspec structs. ``parameters.py`` lists the unsupported fields and their handling."""
