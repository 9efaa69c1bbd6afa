"""Training losses: functions of hidden states and a head; they know no model."""
