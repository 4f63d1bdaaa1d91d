"""The copy of whole blocks: kernel and plan."""
