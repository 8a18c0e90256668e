"""The two small models shipped with the project, and the program that made them (``python -m engine.demo.train``)."""
