//! A switch of nothing but its P4Runtime server: tables without packets. It does what a real one may do: takes the changes
//! of one request in another order, forgets everything, refuses, hears another controller, does not answer.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use paatp_user::switch::client::{election, election_number};
use paatp_user::switch::messages::google::rpc;
use paatp_user::switch::messages::p4::config::v1::P4Info;
use paatp_user::switch::messages::p4::v1::p4_runtime_server::{P4Runtime, P4RuntimeServer};
use paatp_user::switch::messages::p4::v1::{
    CapabilitiesRequest, CapabilitiesResponse, CounterData, CounterEntry, Entity, Error as UpdateError,
    ForwardingPipelineConfig, GetForwardingPipelineConfigRequest, GetForwardingPipelineConfigResponse, Index,
    MasterArbitrationUpdate, ReadRequest, ReadResponse, SetForwardingPipelineConfigRequest,
    SetForwardingPipelineConfigResponse, StreamMessageRequest, StreamMessageResponse, Update, WriteRequest,
    WriteResponse, entity, stream_message_request, stream_message_response, update,
};
use paatp_user::switch::plan::{Key, State, Table, Value};
use paatp_user::switch::program::Program;
use prost::Message;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status, Streaming};

/// What `p4c-bm2-ss --p4runtime-files` tells of p4/paatp.p4, with 1024 slots of 8 blocks.
pub const P4INFO: &[u8] = include_bytes!("../data/paatp.p4info.bin");

/// Messages that wait on a session.
const SESSION_MESSAGES: usize = 16;

/// What the switch has and does.
#[derive(Default)]
pub struct Tables {
    /// Its program.
    pub config: Option<ForwardingPipelineConfig>,
    /// How often one was loaded.
    pub loads: usize,
    /// What stands in its tables.
    pub state: State,
    /// What its counters say.
    pub counts: Vec<i64>,
    /// All changes that it made, in its order.
    pub done: Vec<(update::Type, Key)>,
    /// Changes that it refuses.
    pub refuses: Option<Key>,
    /// It takes requests and does not answer.
    pub is_silent: bool,
    /// Moments at which a job stood there without its ranks, copies or group, in words.
    pub halves: Vec<String>,
    /// Writes of somebody who was not primary.
    pub usurped: usize,
    /// The highest election id that was heard.
    pub highest: u128,
    /// Whoever was primary is gone.
    is_vacant: bool,
    sessions: BTreeMap<u128, mpsc::Sender<Result<StreamMessageResponse, Status>>>,
}

impl Tables {
    fn program(&self) -> Option<Program> {
        Program::of(self.config.as_ref()?.p4info.as_ref()?).ok()
    }

    /// Its program is the one that belongs to this repository.
    fn load_ours(&mut self) {
        let p4info = P4Info::decode(P4INFO).ok();
        self.config = Some(ForwardingPipelineConfig { p4info, ..ForwardingPipelineConfig::default() });
    }

    /// The generations of the jobs that stand there.
    #[must_use]
    pub fn generations(&self) -> Vec<u32> {
        let jobs = self.state.keys().filter_map(|key| match key {
            Key::Entry(Table::Jobs, keys) => keys.get(1).copied(),
            _ => None,
        });
        jobs.map(|generation| generation as u32).collect()
    }

    /// Another controller comes, and is primary.
    pub fn usurp(&mut self, number: u128) {
        self.highest = number;
        for (other, session) in &self.sessions {
            let _ = session.try_send(Ok(arbitration(number, *other, true)));
        }
    }

    /// It goes.
    pub fn vacate(&mut self) {
        self.is_vacant = true;
        for (other, session) in &self.sessions {
            let _ = session.try_send(Ok(arbitration(self.highest, *other, false)));
        }
    }

    fn change(&mut self, program: &Program, change: &Update) -> Result<(), (Code, &'static str)> {
        let entity = change.entity.as_ref().and_then(|entity| program.item(entity));
        let (key, value) = entity.ok_or((Code::InvalidArgument, "not of our tables"))?;
        if self.refuses.as_ref() == Some(&key) {
            return Err((Code::ResourceExhausted, "the table is full"));
        }
        let is_there = self.state.contains_key(&key);
        match change.r#type() {
            update::Type::Insert if is_there => return Err((Code::AlreadyExists, "it is there")),
            update::Type::Modify | update::Type::Delete if !is_there => {
                return Err((Code::NotFound, "it is not there"));
            }
            update::Type::Delete => drop(self.state.remove(&key)),
            update::Type::Insert | update::Type::Modify => drop(self.state.insert(key.clone(), value)),
            update::Type::Unspecified => return Err((Code::InvalidArgument, "no type")),
        }
        self.done.push((change.r#type(), key.clone()));
        if let Some(half) = half(&self.state) {
            self.halves.push(format!("after {:?} of {key:?}: {half:?}", change.r#type()));
        }
        Ok(())
    }
}

/// A job that stands there without the ranks, copies or group of its bits.
#[must_use]
pub fn half(state: &State) -> Option<Key> {
    let is_whole = |keys: &[u128], params: &[u128]| {
        let (Some([number, generation]), Some(local)) = (keys.first_chunk(), params.first()) else {
            return false;
        };
        let copies = match state.get(&Key::Group(*number as u32 + 1)) {
            Some(Value::Copies(copies)) => copies.iter().map(|copy| u128::from(copy.1)).collect(),
            _ => Vec::new(),
        };
        (0..64).filter(|rank| local >> rank & 1 == 1).all(|rank| {
            let is_registered = state.keys().any(|key| match key {
                Key::Entry(Table::Ranks, keys) => keys.starts_with(&[*number, *generation, rank]),
                _ => false,
            });
            let is_known = state.contains_key(&Key::Entry(Table::Copies, vec![*number, rank + 1]));
            is_registered && is_known && copies.contains(&(rank + 1))
        })
    };
    let half = state.iter().find(|(key, value)| match (key, value) {
        (Key::Entry(Table::Jobs, keys), Value::Action { params, .. }) => !is_whole(keys, params),
        _ => false,
    });
    half.map(|(key, _)| key.clone())
}

/// What a session with this number is told, where another one was or is primary.
fn arbitration(primary: u128, own: u128, is_there: bool) -> StreamMessageResponse {
    let code = match (primary == own, is_there) {
        (true, _) => Code::Ok,
        (false, true) => Code::AlreadyExists,
        (false, false) => Code::NotFound,
    };
    let update = MasterArbitrationUpdate {
        election_id: Some(election(primary)),
        status: Some(rpc::Status { code: code as i32, ..rpc::Status::default() }),
        ..MasterArbitrationUpdate::default()
    };
    StreamMessageResponse { update: Some(stream_message_response::Update::Arbitration(update)) }
}

#[derive(Clone, Default)]
struct Service(Arc<Mutex<Tables>>);

impl Service {
    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for ever while it is silent.
    async fn answer(&self) {
        if self.lock().is_silent {
            std::future::pending::<()>().await;
        }
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl P4Runtime for Service {
    type ReadStream = Answers<ReadResponse>;
    type StreamChannelStream = Answers<StreamMessageResponse>;

    async fn write(&self, request: Request<WriteRequest>) -> Result<Response<WriteResponse>, Status> {
        self.answer().await;
        let request = request.into_inner();
        let mut tables = self.lock();
        if election_number(request.election_id.as_ref()) != tables.highest {
            tables.usurped += 1;
            return Err(Status::permission_denied("not primary"));
        }
        let program = tables.program().ok_or_else(|| Status::failed_precondition("no program"))?;
        // In another order than that of the request, as it may.
        let mut results: Vec<_> =
            request.updates.iter().rev().map(|change| tables.change(&program, change)).collect();
        results.reverse();
        if results.iter().all(Result::is_ok) {
            return Ok(Response::new(WriteResponse {}));
        }
        let details = results.into_iter().map(|result| {
            let (code, message) = result.err().unwrap_or((Code::Ok, ""));
            let error = UpdateError {
                canonical_code: code as i32,
                message: message.into(),
                ..UpdateError::default()
            };
            prost_types::Any {
                type_url: "type.googleapis.com/p4.v1.Error".into(),
                value: error.encode_to_vec(),
            }
        });
        let status =
            rpc::Status { code: Code::Unknown as i32, details: details.collect(), ..Default::default() };
        Err(Status::with_details(Code::Unknown, "some failed", status.encode_to_vec().into()))
    }

    async fn read(&self, request: Request<ReadRequest>) -> Result<Response<Self::ReadStream>, Status> {
        self.answer().await;
        let tables = self.lock();
        let program = tables.program().ok_or_else(|| Status::failed_precondition("no program"))?;
        let mut entities = Vec::new();
        for asked in request.into_inner().entities {
            match asked.entity {
                Some(entity::Entity::CounterEntry(counter)) => {
                    entities.extend((0..).zip(&tables.counts).map(|(index, count)| {
                        let data = CounterData { packet_count: *count, ..CounterData::default() };
                        let counter = CounterEntry {
                            counter_id: counter.counter_id,
                            index: Some(Index { index }),
                            data: Some(data),
                        };
                        Entity { entity: Some(entity::Entity::CounterEntry(counter)) }
                    }));
                }
                Some(entity::Entity::TableEntry(ref entry)) => {
                    let of_table = |entity: &Entity| matches!(&entity.entity, Some(entity::Entity::TableEntry(other)) if other.table_id == entry.table_id);
                    entities.extend(tables.all(&program).filter(of_table));
                }
                _ => entities.extend(tables.all(&program).filter(|entity| {
                    matches!(entity.entity, Some(entity::Entity::PacketReplicationEngineEntry(_)))
                })),
            }
        }
        // In pieces.
        let answers: Vec<_> =
            entities.chunks(3).map(|some| Ok(ReadResponse { entities: some.to_vec() })).collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(answers))))
    }

    async fn set_forwarding_pipeline_config(
        &self,
        request: Request<SetForwardingPipelineConfigRequest>,
    ) -> Result<Response<SetForwardingPipelineConfigResponse>, Status> {
        self.answer().await;
        let mut tables = self.lock();
        tables.config = request.into_inner().config;
        tables.state.clear();
        tables.loads += 1;
        Ok(Response::new(SetForwardingPipelineConfigResponse {}))
    }

    async fn get_forwarding_pipeline_config(
        &self,
        _: Request<GetForwardingPipelineConfigRequest>,
    ) -> Result<Response<GetForwardingPipelineConfigResponse>, Status> {
        self.answer().await;
        let config = self.lock().config.clone();
        let config = config.ok_or_else(|| Status::failed_precondition("no program"))?;
        Ok(Response::new(GetForwardingPipelineConfigResponse { config: Some(config) }))
    }

    async fn stream_channel(
        &self,
        request: Request<Streaming<StreamMessageRequest>>,
    ) -> Result<Response<Self::StreamChannelStream>, Status> {
        self.answer().await;
        let (sender, messages) = mpsc::channel(SESSION_MESSAGES);
        let (service, mut requests) = (self.clone(), request.into_inner());
        tokio::spawn(async move {
            let mut own = None;
            while let Ok(Some(message)) = requests.message().await {
                let Some(stream_message_request::Update::Arbitration(update)) = message.update else {
                    continue;
                };
                let number = election_number(update.election_id.as_ref());
                let mut tables = service.lock();
                if number >= tables.highest {
                    (tables.highest, tables.is_vacant) = (number, false);
                }
                own = Some(number);
                tables.sessions.insert(number, sender.clone());
                let _ = sender.try_send(Ok(arbitration(tables.highest, number, !tables.is_vacant)));
            }
            if let Some(own) = own {
                service.lock().sessions.remove(&own);
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }

    async fn capabilities(
        &self,
        _: Request<CapabilitiesRequest>,
    ) -> Result<Response<CapabilitiesResponse>, Status> {
        Ok(Response::new(CapabilitiesResponse::default()))
    }
}

impl Tables {
    fn all<'a>(&'a self, program: &'a Program) -> impl Iterator<Item = Entity> + 'a {
        self.state.iter().map(|(key, value)| program.entity(key, value))
    }
}

/// A switch. Dropping it ends it at once.
pub struct MockSwitch {
    /// Where it is.
    pub address: SocketAddr,
    service: Service,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl MockSwitch {
    /// With our program, at a free port of loopback.
    ///
    /// # Errors
    /// Where there is none.
    pub fn start() -> Result<MockSwitch> {
        let listener = TcpListener::bind("127.0.0.1:0").context("no port for a switch")?;
        let switch = MockSwitch::on(listener)?;
        switch.tables().load_ours();
        Ok(switch)
    }

    /// Without a program, on a socket that may be of another network namespace.
    ///
    /// # Errors
    /// Where there is no thread.
    pub fn on(listener: TcpListener) -> Result<MockSwitch> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let service = Service::default();
        let serving = service.clone();
        let thread = std::thread::Builder::new().name("switch".into()).spawn(move || {
            runtime.block_on(async {
                let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
                let server = Server::builder().add_service(P4RuntimeServer::new(serving));
                tokio::select! {
                    _ = server.serve_with_incoming(TcpIncoming::from(listener)) => {}
                    _ = stopped => {}
                }
            });
        })?;
        Ok(MockSwitch { address, service, stop: Some(stop), thread: Some(thread) })
    }

    /// What it has.
    pub fn tables(&self) -> MutexGuard<'_, Tables> {
        self.service.lock()
    }

    /// Gives it our program.
    pub fn load(&self) {
        self.tables().load_ours();
    }

    /// Ends it, and starts another one at the same address, with our program and nothing in its tables.
    ///
    /// # Errors
    /// Where its port is taken.
    pub fn restart(self) -> Result<MockSwitch> {
        let address = self.address;
        drop(self);
        let listener = TcpListener::bind(address).context("the switch's port is taken")?;
        let switch = MockSwitch::on(listener)?;
        switch.tables().load_ours();
        Ok(switch)
    }
}

impl Drop for MockSwitch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
