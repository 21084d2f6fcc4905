//! Creating an image, cut at every step: once it was said to be there it is, whole; and until then there
//! is nothing, or nothing that opens, or all of it.

use stillpoint_engine::offline::create::{Qcow2Options, create_qcow2};
use stillpoint_engine::{Disk, ImageFormat, Options};
use stillpoint_sim::disk::IMAGE;
use stillpoint_sim::{Chance, Executor, Plan, World, image};

/// What a cut leaves of an image's creation.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Left {
    NoName,
    Nothing,
    All,
}

/// Creates an image until the power fails after so many steps; whether that was the end, and what is left.
fn create(options: &Qcow2Options, seed: u64, steps: u64) -> (bool, Left) {
    let executor = Executor::new(seed);
    let world = World::new(Plan::random(&mut Chance::new(seed)));
    let (queue, files, options) = (executor.queue("creator"), world.files(), options.clone());
    let size = options.size;
    let created = executor.run_until(steps, || {}, async move {
        create_qcow2(&queue, &*files, IMAGE, &options).await.unwrap();
    });
    let after = world.power_cut(&mut Chance::new(seed));
    if !after.exists(IMAGE) {
        return (created.is_some(), Left::NoName);
    }
    let executor = Executor::new(seed);
    let (queue, background, files) = (executor.queue("user"), executor.background(), after.files());
    let opened = executor.run(async move {
        let options = Options { format: Some(ImageFormat::Qcow2), ..Options::default() };
        Disk::open(&queue, &files, &background, IMAGE, options).await.map(|disk| disk.size())
    });
    let left = match opened {
        Ok(found) => {
            assert_eq!(found, size, "seed {seed}, step {steps}");
            let inspection = image::inspect(&after, IMAGE);
            assert_eq!(inspection.map(|found| found.leaks), Ok(0), "seed {seed}, step {steps}");
            Left::All
        }
        Err(_) => Left::Nothing,
    };
    (created.is_some(), left)
}

#[test]
fn an_image_is_there_whole_once_its_creation_was_answered() {
    let options = Qcow2Options { size: 1 << 20, ..Qcow2Options::default() };
    let mut found = Vec::new();
    for seed in 0..40 {
        let ended = (0..).find(|&steps| {
            let (ended, left) = create(&options, seed, steps);
            assert!(!ended || left == Left::All, "seed {seed}: {left:?} after step {steps}");
            found.push(left);
            ended
        });
        assert!(ended.is_some());
    }
    found.sort();
    found.dedup();
    assert_eq!(found, [Left::NoName, Left::Nothing, Left::All]);
}
