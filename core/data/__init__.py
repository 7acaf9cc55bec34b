"""Rows of a table as requests, and their answers as columns: what batch jobs and Ray Data are made of."""
