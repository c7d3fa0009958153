"""Searching for failing trials: where trials come from when no test writes them down."""
