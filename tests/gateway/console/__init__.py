"""Makes this folder a package for pytest, so that fixtures of the scope ``package`` end with its last test and not with the session."""
