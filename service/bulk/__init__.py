"""Jobs over many pictures or texts, which write features to files part by part. Imports torch late."""
