"""`arealflow report`: runs as one HTML page that needs no network. Reads the store; the page draws the charts."""
