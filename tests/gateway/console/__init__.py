"""A package for pytest, so that fixtures of the scope ``package`` end with the last test of this folder and not with the session."""
