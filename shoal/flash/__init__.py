"""Making boards out of computers: what is put on them, and how it is packed."""
