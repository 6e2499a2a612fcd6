"""DeepSpeed's JSON as BigScience's command lines of pretraining name it."""

PIPELINE_AND_ZERO_JSON = {
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 12,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
