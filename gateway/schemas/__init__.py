"""The public API's bodies, as msgspec structs. Unknown fields of a request are ignored and named in a header."""
