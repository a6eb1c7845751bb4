"""`caramba studio`: one page for all runs below a folder, and the SQLite index that makes it fast. Torch-free."""
