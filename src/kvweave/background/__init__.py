"""Work while the machine is idle: predicted questions, answers ahead of time, calibration."""
