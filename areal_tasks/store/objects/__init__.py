"""Object storage: a disk, S3, and files in either of them."""
