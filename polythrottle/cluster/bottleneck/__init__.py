"""Why a job is slower than its parts: noticed, named, and a remedy proposed, done where allowed, and verified."""
