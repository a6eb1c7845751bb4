"""The commands: one file each, with `main(argv)`; table.py lists them."""
