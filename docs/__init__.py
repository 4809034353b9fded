"""The documents, and what fills and draws their figures."""
