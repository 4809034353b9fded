"""The training runs and studies behind pages of docs/evidence."""
