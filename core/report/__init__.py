"""A sweep's results as one HTML page, a Markdown table and PNG plots: `hookline report FOLDER`."""
