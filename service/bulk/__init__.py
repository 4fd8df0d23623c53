"""Jobs over many pictures or texts: features of all of them into files that grow part by part. Imports torch late."""
