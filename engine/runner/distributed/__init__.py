"""One decoder over several processes of one machine, each with its part of every layer and of the keys and values."""
