"""A package for pytest, so that fixtures of the scope ``package`` end with the last test of this folder, not of the session."""
