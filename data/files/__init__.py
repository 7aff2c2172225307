"""Files that may be damaged or hostile.

Reads them within bounds and writes so that none is ever half written; also locks of output places, checksums, and the
text that is safe to show. Imports nothing of the project, and is the one room of `data` that `drafters` may import.
"""
