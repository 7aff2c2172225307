"""Files that may be damaged or hostile: reading them within bounds, and writing so that none is ever half written.

Also locks of output places, checksums, and the text that is safe to show.
"""
