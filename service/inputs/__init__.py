"""What a request sends in: pictures still encoded, arrays, texts, tokens."""
