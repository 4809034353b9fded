"""Other people's frameworks; each module is imported only when it is used."""
