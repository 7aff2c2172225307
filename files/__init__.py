"""Files that may be damaged or hostile: opening, decompressing and parsing them within bounds."""
