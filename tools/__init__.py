"""Scripts for developers; a package, so that none of the same name takes its place."""
