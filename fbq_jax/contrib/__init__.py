"""Support for other frameworks; each module is imported only when it is used."""
