"""Endpoints: routes and answers, one file for each family, and what they share."""
