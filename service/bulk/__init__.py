"""Jobs over many pictures: features of a whole folder into files that grow part by part. Imports torch late."""
