"""`arealflow report`: runs as one HTML page that needs no network. Reads the store; draws nothing itself."""
