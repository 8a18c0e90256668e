"""The public API's bodies, as msgspec structs. ``parameters.py`` says what becomes of fields that they lack."""
