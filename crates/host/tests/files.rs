//! Opening the host's files: names, types, modes, locks between our own openers, messages.

use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use stillpoint_host::{Aio, Cache, HostFile, HostFiles, LoopOptions, Reach, run};
use stillpoint_io::{
    Access, Durability, Error, Files, GrowMeans, Kind, Manage, Queue, Result, Segments, Storage,
};

const FILES: fn(Cache) -> HostFiles =
    |cache| HostFiles::new(Aio::Threads, cache).reaching(Reach::Anywhere);

fn on_a_loop<T>(test: impl AsyncFnOnce(&Queue) -> T) -> T {
    run(LoopOptions { aio: Aio::Threads, depth: 32 }, async |queue| test(&queue).await).unwrap()
}

async fn open(queue: &Queue, path: &Path, access: Access) -> Result<HostFile> {
    FILES(Cache::Writeback).open_host(queue, path.to_str().unwrap(), None, access).await
}

fn message(result: Result<HostFile>) -> (Kind, String) {
    let error: Error = result.unwrap_err();
    (error.kind(), error.to_string())
}

#[test]
fn what_is_no_file_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    on_a_loop(async |queue| {
        let missing = folder.path().join("missing.qcow2");
        let (kind, text) = message(open(queue, &missing, Access::Read).await);
        assert_eq!(kind, Kind::NotFound);
        assert!(text.contains("missing.qcow2"), "{text}");

        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert!(std::fs::metadata(&pipe).unwrap().file_type().is_fifo());
        for access in [Access::Read, Access::Write] {
            let (kind, text) = message(open(queue, folder.path(), access).await);
            assert_eq!(kind, Kind::Invalid);
            assert!(text.contains("a folder"), "{text}");

            // Nobody holds the other end: opening it plainly would wait for ever.
            let (kind, text) = message(open(queue, &pipe, access).await);
            assert_eq!(kind, Kind::Invalid);
            assert!(text.contains("a pipe"), "{text}");

            let (kind, text) = message(open(queue, Path::new("/dev/zero"), access).await);
            assert_eq!(kind, Kind::Invalid);
            assert!(text.contains("a character device"), "{text}");
        }
    });
}

#[test]
fn names_are_paths_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("sub/image.qcow2");
    std::fs::create_dir(folder.path().join("sub")).unwrap();
    std::fs::write(&image, "image").unwrap();
    std::fs::write(folder.path().join("sub/base:1,x=y"), "odd name").unwrap();
    on_a_loop(async |queue| {
        let files = FILES(Cache::Writeback);
        let beside = image.to_str();
        let file = files.open(queue, "base:1,x=y", beside, Access::Read).await.unwrap();
        assert_eq!(file.end(), 8);
        // Relative to the folder of the file that it stands in; absolute names as they are.
        let file = files.open(queue, "../sub/image.qcow2", beside, Access::Read).await.unwrap();
        assert_eq!(file.end(), 5);
        let file = files.open(queue, beside.unwrap(), Some("/x/y"), Access::Read).await.unwrap();
        assert_eq!(file.end(), 5);
        // F2: what looks like options is a file that is not there.
        for name in ["json:{\"driver\":\"raw\"}", "nbd://localhost", "file:image.qcow2"] {
            let error = files.open(queue, name, beside, Access::Read).await.unwrap_err();
            assert_eq!(error.kind(), Kind::NotFound, "{error}");
        }
        let error = files.open(queue, "a\0b", beside, Access::Read).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
    });
}

#[test]
fn files_opened_for_reading_refuse_changes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, [1; 8192]).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
    on_a_loop(async |queue| {
        let file = open(queue, &path, Access::Read).await.unwrap();
        assert!(file.facts().read_only && !file.facts().can_punch);
        let write = file.write(queue, 0, Segments::zeroed(512), Durability::Volatile);
        assert_eq!(write.await.unwrap_err().kind(), Kind::ReadOnly);
        let grow = Manage::Grow { end: 1 << 20, means: GrowMeans::Truncate };
        for change in [grow, Manage::Punch { offset: 0, length: 4096 }] {
            assert_eq!(file.manage(queue, change).await.unwrap_err().kind(), Kind::ReadOnly);
        }
        file.flush(queue).await.unwrap();
    });
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 8192);
}

#[test]
fn creating_makes_or_empties_but_not_under_a_holder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new.raw");
    let name = path.to_str().unwrap();
    on_a_loop(async |queue| {
        let files = FILES(Cache::None);
        let file = files.create(queue, name).await.unwrap();
        assert_eq!(file.end(), 0);
        let grow = Manage::Grow { end: 8192, means: GrowMeans::Truncate };
        file.manage(queue, grow).await.unwrap();
        let error = files.create(queue, name).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Busy);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 8192);
        drop(file);
        assert_eq!(files.create(queue, name).await.unwrap().end(), 0);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        let nowhere = folder.path().join("no/such/folder/x");
        let error = files.create(queue, nowhere.to_str().unwrap()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::NotFound);
        assert!(error.to_string().contains("create its folder first"), "{error}");
    });
}

#[test]
fn one_writer_or_many_readers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    std::fs::write(&path, [0; 4096]).unwrap();
    on_a_loop(async |queue| {
        let writer = open(queue, &path, Access::Write).await.unwrap();
        for access in [Access::Read, Access::Write] {
            let (kind, text) = message(open(queue, &path, access).await);
            assert_eq!(kind, Kind::Busy);
            let this = format!("(this process {})", std::process::id());
            assert!(text.contains(&this), "{text}");
        }
        open(queue, &path, Access::ReadUnlocked).await.unwrap();
        drop(writer);
        let readers: Vec<HostFile> = {
            let mut readers = Vec::new();
            for _ in 0..3 {
                readers.push(open(queue, &path, Access::Read).await.unwrap());
            }
            readers
        };
        assert_eq!(message(open(queue, &path, Access::Write).await).0, Kind::Busy);
        drop(readers);
        // A lock lives as long as its file, also in another view of it.
        let writer = open(queue, &path, Access::Write).await.unwrap();
        let view = writer.buffered().unwrap();
        drop(writer);
        assert_eq!(message(open(queue, &path, Access::Read).await).0, Kind::Busy);
        drop(view);
        open(queue, &path, Access::Read).await.unwrap();
    });
}

#[test]
fn a_lock_is_free_once_its_file_is_dropped_though_operations_were_in_flight() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    for aio in Aio::ALL {
        run(LoopOptions { aio, depth: 32 }, async |queue| {
            let files = HostFiles::new(aio, Cache::None);
            for _ in 0..20 {
                let name = path.to_str().unwrap();
                let file = files.open(&queue, name, None, Access::Write).await.unwrap();
                let reads = (0..50).map(|n| file.read(&queue, n * 4096, Segments::alloc(4096)));
                for read in reads.collect::<Vec<_>>() {
                    read.await.unwrap();
                }
                drop(file);
            }
        })
        .unwrap();
    }
}

#[test]
fn cache_modes_have_names_and_directness() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    for cache in Cache::ALL {
        assert_eq!(cache.to_string().parse::<Cache>().unwrap(), cache);
        let file = on_a_loop(async |queue| {
            let files = HostFiles::new(Aio::Native, cache);
            files.open_host(queue, path.to_str().unwrap(), None, Access::Write).await.unwrap()
        });
        let direct = matches!(file.cache(), Cache::None | Cache::DirectSync);
        let align = file.facts().request_align;
        assert_eq!(direct, align > 1);
        // R9: whole blocks of the file system.
        assert!(!direct || align.is_multiple_of(file.facts().fs_block));
        // Linux AIO without direct I/O would block the loop.
        assert_eq!(file.aio(), if direct { Aio::Native } else { Aio::Threads });
    }
    assert_eq!("fast".parse::<Cache>().unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn storage_is_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<HostFile>();
    shared::<Arc<dyn Storage>>();
    shared::<HostFiles>();
}

/// Collects the fields of `stillpoint::host_io` events.
#[derive(Default)]
struct Seen(std::sync::Mutex<Vec<(u64, u64, u64)>>);

struct Watch(Arc<Seen>);

impl tracing::Subscriber for Watch {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "stillpoint::host_io"
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        #[derive(Default)]
        struct Fields(u64, u64, u64);
        impl tracing::field::Visit for Fields {
            fn record_u64(&mut self, field: &tracing::field::Field, value: u64) {
                match field.name() {
                    "offset" => self.0 = value,
                    "length" => self.1 = value,
                    "end" => self.2 = value,
                    _ => {}
                }
            }
            fn record_debug(&mut self, _: &tracing::field::Field, _: &dyn std::fmt::Debug) {}
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        self.0.0.lock().unwrap().push((fields.0, fields.1, fields.2));
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn submitted_writes_can_be_watched() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let seen = Arc::new(Seen::default());
    tracing::subscriber::with_default(Watch(seen.clone()), || {
        run(LoopOptions { aio: Aio::IoUring, depth: 32 }, async |queue| {
            let files = HostFiles::new(Aio::IoUring, Cache::None);
            let file = files.create(&queue, path.to_str().unwrap()).await.unwrap();
            let grow = Manage::Grow { end: 65536, means: GrowMeans::Truncate };
            file.manage(&queue, grow).await.unwrap();
            for offset in [0, 61440, 65536] {
                let write =
                    file.write(&queue, offset, Segments::zeroed(4096), Durability::Volatile);
                // R3: the last one is refused, and so never seen.
                assert_eq!(write.await.is_ok(), offset < 65536);
            }
        })
        .unwrap();
    });
    assert_eq!(*seen.0.lock().unwrap(), [(0, 4096, 65536), (61440, 4096, 65536)]);
}
