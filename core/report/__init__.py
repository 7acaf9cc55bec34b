"""A sweep's results as one HTML page, a Markdown table and PNG plots: `python -m core.report FOLDER`."""
