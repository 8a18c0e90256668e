"""The length model's half of the API: steering how long a text gets, and telling how long it may still be."""
