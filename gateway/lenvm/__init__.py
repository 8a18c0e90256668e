"""The length model in the API: guidance of the length of a text, and estimates of its remaining length."""
