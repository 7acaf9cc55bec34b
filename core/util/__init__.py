"""Small helpers without any code about inference."""
