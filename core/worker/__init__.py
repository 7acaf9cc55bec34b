"""One rank on its device: steps launched, computed and collected; docs/architecture.md has its packages."""
